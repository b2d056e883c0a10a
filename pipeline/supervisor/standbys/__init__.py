"""Warm standbys: processes with models loaded that can replace a lost worker within seconds."""
