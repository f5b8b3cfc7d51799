"""HTTP: health, readiness, status, metrics and a page for people; and an operator's holds. In reading order:

report     what is told: the structs of the JSON, who gives them, and the words that page and client share
app        the routes, read-only
operate    the routes of what an operator may change
answers    how both answer: JSON, and errors in words
metrics    one view of the fleet -> the Prometheus text
page       one view of the fleet -> one HTML page
server     uvicorn on a thread of its own, its socket bound beforehand
client     `wavekeeper status` and `wavekeeper healthcheck`; loads none of the others but report
operator_client  `wavekeeper hold` and `wavekeeper resume`

Everything is made from one `FleetView` when it is asked for and nothing is kept, so that a probe changes nothing and a
rank that is gone leaves nothing behind.
"""
