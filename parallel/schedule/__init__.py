"""Who computes what in which order: actions, the schedules of the papers, passes over them, proof and simulation."""
