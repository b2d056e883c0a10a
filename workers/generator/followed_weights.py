"""The weights of a standby's engine: each new version that this host has in a file, verified.

It sends the learner no request, and copies nothing that an engine can use where it lies. Adapters,
and versions of another host, are left to the generator that the standby may become."""

from __future__ import annotations

from pathlib import Path

from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.digest import digest_buffer
from pipeline.weights.shared_files import MappedFile, SharedFileReader
from protocol.errors import WeightsDamaged
from workers.engines.generation.seam import GenerationEngine


class FollowedWeights:
    """The newest version of a standby's engine. Blocking."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self.reader = SharedFileReader()
        self.serving: tuple[WeightsAnnouncement, MappedFile] | None = None
        """The version that the engine serves, with the file that it may use."""

    @property
    def policy_version(self) -> int:
        """The engine's version; below 0 before the first."""
        return self._engine.policy_version

    def close(self) -> None:
        """Give the files back to their writer."""
        self.reader.close()

    def follow(self, announcement: WeightsAnnouncement) -> bool:
        """Give the engine this version, if it is a newer one in a file here; return whether it has
        it. A version that is just being replaced is left out.

        Raises WeightsDamaged: the file is not as it was published, or the engine does not serve
        it."""
        version = announcement.policy_version
        if version <= self._engine.policy_version:
            return True
        if announcement.base is not None:
            return False
        try:
            file = self._verified(announcement)
        except OSError:
            return False
        tensors = self._engine.view_weights(file.data, file.lasting_path)
        self._engine.stage_weights(tensors, version)
        self._engine.load_weights(tensors, version)
        if (unserved := self._engine.unserved(tensors)) or self._engine.policy_version != version:
            raise WeightsDamaged(
                f"the engine was given version {version} but does not serve it: {len(unserved)} tensors differ"
            )
        if self.serving is not None:
            self.reader.release(self.serving[1])
        self.serving = announcement, file
        return True

    def _verified(self, announcement: WeightsAnnouncement) -> MappedFile:
        # a mapping that was kept is made afresh before the file is blamed
        for _ in range(2):
            file = self.reader.open(Path(announcement.path))
            if file.data.size == announcement.num_bytes and digest_buffer(file.data) == announcement.digest:
                return file
            self.reader.forget(file)
        raise WeightsDamaged(f"{announcement.path} is not version {announcement.policy_version} as it was published")
