"""Order of all computations: actions, the schedules of the papers, passes over them, proof and simulation."""
