"""Objects that exist before a study are exempt from garbage collection during it, and not afterwards."""

import gc

from mooring_lab.model.gc_control import gc_frozen


def test_objects_are_frozen_inside_the_outermost_context_only():
    gc.unfreeze()  # of the test session
    try:
        with gc_frozen():
            with gc_frozen():
                pass
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()
