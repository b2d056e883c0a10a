"""Where workers are started: on this host, or on places that other systems hand out."""
