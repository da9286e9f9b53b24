"""The artifact folder, as it is read: manifest, files and their checks."""
