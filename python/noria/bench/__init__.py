"""What `noria bench` measures, apart from the command line: workloads, machine, runs and their reports."""
