"""Predictors: which cold neurons to compute, before computing them (data flow: ``predictors.safetensors``)."""

from torch_pi2.predict.exact import ExactGate
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.lowrank_rows import LowRankRows
from torch_pi2.predict.protocol import Predictor, PredictorCard
from torch_pi2.predict.signbit import SignBit, pack_signs
from torch_pi2.predict.size import FitReport, FittedPredictors, fit, load_predictors, save_predictors
from torch_pi2.predict.train import calibrate, exact_gate, measure, train_lowrank

__all__ = [
    "ExactGate",
    "FitReport",
    "FittedPredictors",
    "LowRank",
    "LowRankRows",
    "Predictor",
    "PredictorCard",
    "SignBit",
    "calibrate",
    "exact_gate",
    "fit",
    "load_predictors",
    "measure",
    "pack_signs",
    "save_predictors",
    "train_lowrank",
]
