"""The artifact folder, as it is written."""
