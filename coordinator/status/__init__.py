"""HTTP: health, readiness, status, metrics and a page for people. Read-only. In reading order:

report     what is told: the structs of the JSON, who gives them, and the words that page and client share
app        the routes
metrics    one view of the fleet -> the Prometheus text
page       one view of the fleet -> one HTML page
server     uvicorn on a thread of its own, its socket bound beforehand
client     `wavekeeper status` and `wavekeeper healthcheck`; loads none of the others but report

Everything is made from one `FleetView` when it is asked for and nothing is kept, so that a probe changes nothing and a
rank that is gone leaves nothing behind.
"""
