"""Models and losses as plain torch modules. Nothing else of MegaTile is imported here."""
