"""Ranks as processes: started, watched, restarted, stopped."""
