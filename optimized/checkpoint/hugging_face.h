// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>

#include "core/dtype.h"
#include "core/io/file_operations.h"

/// Folders that Hugging Face `transformers` reads and writes for GPT2LMHeadModel: config.json, and model.safetensors or several
/// files with model.safetensors.index.json. Names and layouts are those of tandem's parameters, behind "transformer." but for
/// lm_head.weight. The equations are the same with activation "gelu_new". One tensor at a time is in memory.
namespace tandem {

struct HuggingFaceExport {
  DType dtype = DType::f32;                             ///< of the file: f32, f16 or bf16, rounded to nearest
  std::int64_t max_file_bytes = std::int64_t{4} << 30;  ///< tensors are dealt to files of at most so much, or of one tensor
  FileOperations* files = nullptr;                      ///< borrowed; null: system_files()
};

struct HuggingFaceSummary {
  std::int64_t parameters = 0;
  std::int64_t bytes = 0;  ///< of the files of tensors
  std::int64_t files = 0;  ///< of tensors
};

/// Writes the parameters (master copies) of a step folder as `out_folder`, which appears whole or not at all. Throws InputError
/// where `out_folder` exists and is not empty, for a model with experts, for values that fp16 cannot hold, and for another dtype;
/// IoError as FileOperations.
HuggingFaceSummary export_hugging_face(const std::filesystem::path& step_folder, const std::filesystem::path& out_folder,
                                       const HuggingFaceExport& options = {});

/// Makes a checkpoint of step 0 from a folder of Hugging Face: parameters as fp32, moments zero, the configuration's defaults for
/// everything that config.json does not say. Names may come with or without "transformer."; the causal masks that old files hold
/// are passed over. `out_folder` must hold no checkpoint. Returns the step folder.
///
/// Throws InputError naming file and field or tensor: another model type or activation, options of GPT-2 that tandem has not,
/// a tensor that is unknown, missing, there twice, of another shape or dtype (F32, F16, BF16 are read), a tied head that differs
/// from the embedding.
std::filesystem::path import_hugging_face(const std::filesystem::path& hugging_face_folder,
                                          const std::filesystem::path& out_folder, FileOperations* files = nullptr);

}  // namespace tandem
