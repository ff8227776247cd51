// Token id of padding rows of a batch, whose embedding is zero. Only decode_inputs writes it; the
// sampler's -1 ("no token") is a different value.
#pragma once

constexpr int kPaddingId = -2147483647 - 1;  // PADDING_ID of engine/reference/embedding.py
