"""Sharded parameters and collectives over ranks."""
