"""Launchers: start workers on this host, or through ssh, Slurm, Kubernetes and Ray."""
