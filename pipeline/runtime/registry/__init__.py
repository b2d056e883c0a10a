"""The registry: incarnations, endpoints, heartbeats, the desired fleet, published weights. One
contract kept twice.
"""
