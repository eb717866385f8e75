"""Networks split over devices and hosts: who holds what, exact selection, counts beyond 32 bits."""
