#include "hopper/decode/codes.cuh"

namespace pantile::hopper {
template Status launch_decode_codes<576>(const DecodePlan&, const decode::DecodeParams&,
                                         cudaStream_t);
}  // namespace pantile::hopper
