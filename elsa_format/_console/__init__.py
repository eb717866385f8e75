"""What commands say and are told: their options, their words on a terminal, their progress."""
