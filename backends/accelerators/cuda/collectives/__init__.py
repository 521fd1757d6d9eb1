"""AllReduce, and what ops share of it: Lamport exchanges, norms, written outputs."""
