"""How often, and after which pauses, something is tried again that others or the network got in the way of."""

PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Between two requests to a store that is away: none of them repeats what its client has repeated for itself."""
ATTEMPTS = 20
"""Of a change to a ledger that others change too: each costs a read, and somebody got on with each that failed."""
