"""Which worker of a fleet is odd: by explicit rules, and compared with its peers and its own past.

Everything here is pure: numbers and times are arguments."""
