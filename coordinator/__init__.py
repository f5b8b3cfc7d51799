"""The coordinator process. In reading order:

core            pure: events in, effects out; every decision about waves, holds, epochs and ranks
config          what an operator can say; config_relations holds what must hold between the parts
config_load     a file, the environment and flags -> a `Config`, or every mistake with its line
config_words    how a mistake is told
yaml_source     YAML with the place of everything in it
logs            log lines on stderr
transport       ZeroMQ sockets: bytes and addresses
term            the number of this coordinator's leadership, over restarts
service         the loop: receive, decode, handle, perform
status          HTTP: health, readiness, status, metrics, events
cli             the door of the console script; commands and config_cli hold its commands

This process never imports torch. Importing the package loads none of these.
"""
