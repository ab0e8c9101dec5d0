"""The parts of the runtime: steps being submitted, steps in flight, and the verbs of sequences."""
