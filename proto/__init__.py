"""The wire contract; imports nothing of ours, and of others only msgspec.

Reading order: `PROTOCOL.md` (the contract in words), `messages`, `codec` (bytes <-> messages), `rows` (the 64-byte
row), `endpoints`, `errors`, `process_identity` (has a neighbour's process ended?), `document` (prints the tables of
PROTOCOL.md), `vectors/` (golden bytes).
"""
