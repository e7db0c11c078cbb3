"""From slide file to batches. No model and no communication library is imported here."""
