"""Benchmarks beside peers; results are ratios."""
