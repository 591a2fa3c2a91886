"""Load on a server and what it answers: workloads, arrivals, clients, percentiles."""
