"""Where states lie between uses: on the device, in a tier, or partly in both."""

from partita.state.tiers.array import Array
from partita.state.tiers.homes import Homes
from partita.state.tiers.tier import Done, Pending, Store, Tier, TierRequest, aligned_empty
from partita.state.tiers.updater import FarUpdater

__all__ = ["Array", "Done", "FarUpdater", "Homes", "Pending", "Store", "Tier", "TierRequest", "aligned_empty"]
