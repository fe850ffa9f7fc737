"""scoped_patch."""
