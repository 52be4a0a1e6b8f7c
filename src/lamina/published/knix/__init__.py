"""KNIX with shared GPUs: fractions of a device sized by the user, lent while they are idle."""
