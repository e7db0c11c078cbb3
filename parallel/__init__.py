"""Running a model over ranks. Nothing else of MegaTile is imported here."""
