"""Programs that use the core. No file of the core imports them: without this folder all that the
core's docstrings say still works. Each runs from the root of the repository as

    python -m tools.NAME --help
"""
import base      # without numpy or torch all of them end in its line
