// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Checkpoints: FOLDER/step-00000120/{shard-RANK,residuals-RANK}.safetensors and manifest.json, FOLDER/latest. Any layout loads
/// what any other has saved. docs/formats.md describes the files.

#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/checkpointer.h"
#include "optimized/checkpoint/load.h"
#include "optimized/checkpoint/manifest.h"
