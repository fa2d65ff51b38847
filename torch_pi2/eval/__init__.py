"""Quality and speed: held-out loss (:mod:`.loss`), tasks of lm-eval (:mod:`.harness`), :mod:`.work`, :mod:`.timing`."""
