"""Example configurations, shipped with the package: `demo.yaml` is what `wavekeeper demo` starts from, `mixed.yaml`
a commented fleet.
"""
