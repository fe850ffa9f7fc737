"""Other projects' patching functions, with their names and signatures, on top of scopes."""
