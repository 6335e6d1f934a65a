"""A gym for recovery: the same faults under six policies, beside the undisturbed run.

    python -m tools.faults                              # everything: twenty minutes on one core
    python -m tools.faults "lr x 300" "other data"      # some faults, by name

A healthy run is stopped half way. From its checkpoints each fault is trained to the end under each
policy, by train.Run: model, data, updates and saves are the same for all policies.

    healthy     step 1 ---------------> 150 ---------------> 300        validation loss
    disturbed                            +-- fault, policy --> 300      the same, and steps lost

A step is lost if it was computed, or left to do, and is not in the final model. A run that ends
early has the loss of the checkpoint that it leaves. A false alarm is a healthy run in which a
policy would have acted. Under every policy an update that is not finite is skipped, as by any loss
scaler.
"""
