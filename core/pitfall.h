// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace tandem {

/// Known ways to get a technique silently wrong, planted as fault points outside inner loops. Always compiled, so that the binary
/// that is tested is the one that ships. Only `tandem pitfalls` and tests switch one on. suites/pitfalls.json says of each what
/// goes wrong, the public report that it is modelled on, and which suite must catch it.
enum class Pitfall : std::uint8_t {
  // data parallelism
  mean_of_micro_batch_means,
  mean_of_rank_means,
  last_accumulation_not_reduced,
  all_reduce_dropped,
  half_reduction_sums_before_dividing,
  half_reduction_divides_before_summing,
  last_rank_gradient_scaled,
  gradient_never_written,
  gradient_off_by_a_little,
  // model and optimizer
  gelu_with_erf,
  layer_norm_small_epsilon,
  decay_on_every_tensor,
  adam_epsilon_inside_root,
  clipping_dropped,
  clip_without_epsilon,
  dropout_keyed_by_local_row,
  resume_forgets_moments,
  // tensor parallelism
  replicated_counted_per_tensor_rank,
  dropout_stream_out_of_step,
  attention_dropout_keyed_by_local_head,
  softmax_term_skipped_off_owner,
  padding_in_softmax,
  row_bias_on_every_rank,
  row_bias_divided,
  norm_gradient_not_reduced,
  norm_gradient_averaged,
  column_input_gradient_not_reduced,
  // pipeline parallelism
  tied_embedding_summed_after_scatter,
  tied_embedding_not_summed,
  gradient_scaled_per_micro_batch,
  labels_of_another_micro_batch,
  messages_without_envelope,
  send_buffer_reused_early,
  weight_part_skipped_once,
  recv_read_before_wait,
  // context parallelism
  ring_merge_forgets_normaliser,
  context_positions_local,
  context_gradients_not_reduced,
  zigzag_mask_by_local_index,
  // expert parallelism
  auxiliary_loss_per_micro_batch,
  expert_gradient_reduced_over_data,
  dropped_token_takes_slot_zero,
  gates_not_renormalised,
  // recomputation
  recompute_draws_other_masks,
  recomputed_activations_kept,
  // mixed precision
  overflow_not_agreed,
  scale_updated_before_agreement,
  clipped_before_unscale,
  norm_with_next_scale,
  overflow_keeps_growth_count,
  skipped_step_counts_as_update,
  master_not_refreshed_on_load,
  update_in_storage_precision,
  scaler_count_not_saved,
  unscaled_in_half,
  micro_batches_summed_in_half,
  growth_count_exceeds,
  fp8_history_not_saved,
  fp8_amax_of_one_rank,
  // zero
  norm_over_unowned_gradients,
  shard_remainder_dropped,
  gathered_weights_stale,
  offload_read_too_early,
  full_optimizer_state_kept,
  buckets_in_arrival_order,
  gathered_parameters_kept,
  // overlap
  bucket_buffer_reused_in_flight,
  bucket_sent_before_filled,
  wait_missing_before_norm,
  overlap_lost_to_blocking_wait,
  tensor_chunk_merge_too_early,
  // compression
  sparse_index_wraps,
  residual_not_saved,
  residual_of_rank_zero,
  residual_keyed_by_bucket,
  residual_reset_on_rebuild,
  last_nibble_dropped,
  compression_not_active,
  residual_committed_on_skipped_step,
  quantized_sum_without_server_feedback,
  residual_keeps_old_scale,
  // checkpoint
  checkpoint_written_in_place,
  latest_before_durable,
  checkpoint_of_live_step,
  last_good_checkpoint_pruned,
  snapshot_aliases_live_state,
  schedule_restarts_on_load,
  random_step_restarts_on_load,
  fused_shards_in_rank_order,
  missing_tensor_keeps_initial,
  missing_hash_accepted,
  every_replica_writes,
  save_waits_for_disk,
  // data pipeline
  sample_index_wraps,
  padding_is_target,
  packed_documents_attend,
  buckets_drained_in_order,
  labels_shifted_twice,
  resume_skips_every_epoch,
  prefetch_reads_on_demand,
  // recovery
  departed_samples_forgotten,
  waiting_rank_taken_for_hung,
  one_limit_for_all_phases,
  reported_rank_never_cleared,
  messages_without_deadline,
  shrink_keeps_accumulation,
  memory_tier_not_used,
  neighbour_keeps_own_shard,
  straggler_by_wall_time,
  // anomaly
  nan_checked_on_rank_zero,
  nan_raised_on_one_rank,
  unsound_state_saved,
  healthy_checkpoint_pruned,
  skip_by_update_number,
  rollback_without_limit,
  spike_enters_window,
  replica_compared_with_itself,
  rollback_keeps_moments,
  monitors_not_sampled,
  // compositions
  groups_from_transposed_grid,
  reduction_over_wrong_group,
  rows_by_world_rank,
  replicated_clipped_on_tensor_rank_zero,
  stage_clips_by_own_norm,
  // collectives
  reduced_element_flipped,
  ring_step_off_by_one,
  collective_parts_swapped,
  small_message_protocol_stale,
  hierarchical_counts_leader_twice,
  // metrics
  full_attention_flops,
  peak_of_one_device,
  spans_summed_not_united,
  waits_counted_as_compute,
  timer_stopped_before_completion,
  warm_up_included,
  all_reduce_factor_for_every_collective,
  communication_counted_twice,
  recompute_counted_in_mfu,
  bubble_not_scaled_by_chunks,
  memory_of_last_stage_for_all,
  contention_ignored,
  // harness
  both_sides_frozen,
  same_batch_on_every_rank,
  bound_widened,
  verdict_of_rank_zero,
  count_  ///< number of pitfalls; not one of them
};
inline constexpr std::size_t kPitfalls = static_cast<std::size_t>(Pitfall::count_);

/// "mean_of_rank_means": its identity on the command line and in pitfalls.json.
[[nodiscard]] std::string_view name(Pitfall pitfall);
[[nodiscard]] std::optional<Pitfall> find_pitfall(std::string_view name);
[[nodiscard]] std::span<const Pitfall> all_pitfalls();

/// The pitfalls that are switched on: none, except under `tandem pitfalls` and in tests. A value, carried in RankContext.
class PitfallSet {
 public:
  PitfallSet() = default;
  explicit PitfallSet(std::span<const Pitfall> pitfalls) {
    for (const Pitfall pitfall : pitfalls) bits_.set(static_cast<std::size_t>(pitfall));
  }
  [[nodiscard]] bool on(Pitfall pitfall) const noexcept { return bits_.test(static_cast<std::size_t>(pitfall)); }
  [[nodiscard]] bool any() const noexcept { return bits_.any(); }
  [[nodiscard]] std::vector<Pitfall> list() const;

 private:
  std::bitset<kPitfalls> bits_;
};

}  // namespace tandem
