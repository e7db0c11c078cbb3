"""Plain torch modules. Nothing else of MegaTile is imported here."""
