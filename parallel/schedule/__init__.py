"""Order of all computation: actions, schedules of the papers, passes over them, proof and simulation."""
