"""Parameters of which two ranks of a pipeline hold a copy: tied embeddings of the first and the last stage."""

from __future__ import annotations

import torch
import torch.distributed as dist

from partita.runtime.collectives import GRADIENTS
from partita.runtime.mesh import Mesh
from partita.runtime.traffic import sending
from partita.state.bucket import Bucket
from partita.state.units import SHARED, Stages


class Copies:
    """Which buckets have a copy elsewhere along the pipeline axis. Each such bucket holds one parameter, so that both are cut alike."""

    def __init__(self, stages: Stages | None, mesh: Mesh) -> None:
        self._shared = stages.shared if stages is not None else {}
        self._here = mesh.coordinates["pipeline"]
        self._group = mesh.group(("pipeline",))

    def _ranks(self, bucket: Bucket) -> tuple[int, ...]:
        return self._shared.get(bucket.layout.unit.removeprefix(SHARED), (self._here,))

    def owns(self, bucket: Bucket) -> bool:
        """Whether this rank counts the bucket in the norm, and saves it, for all that hold it."""
        return self._ranks(bucket)[0] == self._here

    def sum(self, bucket: Bucket) -> None:
        """Add the reduced gradient of the other copy. Both ranks make the same sum, so their weights stay equal bit by bit."""
        for other in self._ranks(bucket):
            if other == self._here:
                continue
            with bucket.changing() as reduced:
                theirs, peer = torch.empty_like(reduced), self._group.ranks[other]
                send = dist.P2POp(dist.isend, reduced, peer, self._group.process_group)
                receive = dist.P2POp(dist.irecv, theirs, peer, self._group.process_group)
                with sending(GRADIENTS, reduced.nbytes):
                    for work in dist.batch_isend_irecv([send, receive]):
                        work.wait()
                reduced.add_(theirs)
