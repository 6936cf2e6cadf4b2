// Clusters of blocks, as far as csrc uses them.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

struct Cluster {
  unsigned num_blocks() const { return emulated::in_cluster().size; }
  unsigned block_rank() const { return emulated::in_cluster().rank; }
  void sync() const { emulated::cluster_barrier(); }
  template <typename T>
  T* map_shared_rank(T* address, int rank) const {
    return static_cast<T*>(emulated::in_block(address, static_cast<unsigned>(rank)));
  }
};

inline Cluster this_cluster() { return {}; }

}  // namespace cooperative_groups
