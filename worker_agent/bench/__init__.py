"""`wavekeeper bench`: how long things take here, beside what engines use today, in one run.

Reading order: `cli` (the options), `exchange` (which processes, and what comes of them), `rank` (one process, one
rank), `report` (the table and the JSON).
"""
