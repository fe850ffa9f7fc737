"""Imported once by the process that all ranks are forked from: they find remote code loaded, and write no file at once."""

from tests.support.remote import kimi_vl_classes

kimi_vl_classes()
