"""The demo: a small real engine (a byte-level decoder, dense or MoE) on top of `RankAgent`, one process per rank.

It is a complete engine in miniature: continuous batching, chunked prefill, a KV cache, and for MoE experts that are
spread over the ranks, so that tokens travel through a collective in every layer. A rank that leaves a step out
hangs this group as it would hang a large one.

Reading order: `model` (the decoder), `engine` (the loop around it), `wire` (requests and results), `rank` (one
process); then the replay: `trace` (a real one), `fleet` (the processes), `replay` (requests in time), `chaos` (what is
killed meanwhile, if asked for), `display` (what is seen), `report` (the figures), `run` (all of it), `cli` (the
command).
"""

import warnings

# torch complains about a missing numpy when it is first imported, and nothing here uses numpy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
