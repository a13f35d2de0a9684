"""One role a module; plain Python classes that the single controller turns into actors."""
