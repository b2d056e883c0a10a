"""How an engine around a torch model reads versions: whole ones, or an adapter with its base."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.weights.tensorfile import Publication
from workers.engines.model import adapter as adapters
from workers.engines.model import weights_file


class TorchWeights:
    def view_weights(self, data: np.ndarray, path: Path) -> weights_file.PublishedWeights:
        return weights_file.view_weights(data, path=path, is_lasting=True)

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        return adapters.publish_merged(adapter, base, base_digest, dtype=dtype)
