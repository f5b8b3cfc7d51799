# Before any test module imports torch itself: this package silences torch's complaint about a missing numpy.
import wavekeeper.worker_agent.demo.model  # noqa: F401
