// SPDX-License-Identifier: Apache-2.0
#include "core/pitfall.h"

#include <array>

namespace tandem {
namespace {

struct Named {
  Pitfall pitfall;
  std::string_view name;
};

constexpr std::array kNames = {
    Named{Pitfall::mean_of_micro_batch_means, "mean_of_micro_batch_means"},
    Named{Pitfall::mean_of_rank_means, "mean_of_rank_means"},
    Named{Pitfall::last_accumulation_not_reduced, "last_accumulation_not_reduced"},
    Named{Pitfall::all_reduce_dropped, "all_reduce_dropped"},
    Named{Pitfall::half_reduction_sums_before_dividing, "half_reduction_sums_before_dividing"},
    Named{Pitfall::half_reduction_divides_before_summing, "half_reduction_divides_before_summing"},
    Named{Pitfall::last_rank_gradient_scaled, "last_rank_gradient_scaled"},
    Named{Pitfall::gradient_never_written, "gradient_never_written"},
    Named{Pitfall::gradient_off_by_a_little, "gradient_off_by_a_little"},
    Named{Pitfall::gelu_with_erf, "gelu_with_erf"},
    Named{Pitfall::layer_norm_small_epsilon, "layer_norm_small_epsilon"},
    Named{Pitfall::decay_on_every_tensor, "decay_on_every_tensor"},
    Named{Pitfall::adam_epsilon_inside_root, "adam_epsilon_inside_root"},
    Named{Pitfall::clipping_dropped, "clipping_dropped"},
    Named{Pitfall::clip_without_epsilon, "clip_without_epsilon"},
    Named{Pitfall::dropout_keyed_by_local_row, "dropout_keyed_by_local_row"},
    Named{Pitfall::resume_forgets_moments, "resume_forgets_moments"},
    Named{Pitfall::replicated_counted_per_tensor_rank, "replicated_counted_per_tensor_rank"},
    Named{Pitfall::dropout_stream_out_of_step, "dropout_stream_out_of_step"},
    Named{Pitfall::attention_dropout_keyed_by_local_head, "attention_dropout_keyed_by_local_head"},
    Named{Pitfall::softmax_term_skipped_off_owner, "softmax_term_skipped_off_owner"},
    Named{Pitfall::padding_in_softmax, "padding_in_softmax"},
    Named{Pitfall::row_bias_on_every_rank, "row_bias_on_every_rank"},
    Named{Pitfall::row_bias_divided, "row_bias_divided"},
    Named{Pitfall::norm_gradient_not_reduced, "norm_gradient_not_reduced"},
    Named{Pitfall::norm_gradient_averaged, "norm_gradient_averaged"},
    Named{Pitfall::column_input_gradient_not_reduced, "column_input_gradient_not_reduced"},
    Named{Pitfall::tied_embedding_summed_after_scatter, "tied_embedding_summed_after_scatter"},
    Named{Pitfall::tied_embedding_not_summed, "tied_embedding_not_summed"},
    Named{Pitfall::gradient_scaled_per_micro_batch, "gradient_scaled_per_micro_batch"},
    Named{Pitfall::labels_of_another_micro_batch, "labels_of_another_micro_batch"},
    Named{Pitfall::messages_without_envelope, "messages_without_envelope"},
    Named{Pitfall::send_buffer_reused_early, "send_buffer_reused_early"},
    Named{Pitfall::weight_part_skipped_once, "weight_part_skipped_once"},
    Named{Pitfall::recv_read_before_wait, "recv_read_before_wait"},
    Named{Pitfall::ring_merge_forgets_normaliser, "ring_merge_forgets_normaliser"},
    Named{Pitfall::context_positions_local, "context_positions_local"},
    Named{Pitfall::context_gradients_not_reduced, "context_gradients_not_reduced"},
    Named{Pitfall::zigzag_mask_by_local_index, "zigzag_mask_by_local_index"},
    Named{Pitfall::auxiliary_loss_per_micro_batch, "auxiliary_loss_per_micro_batch"},
    Named{Pitfall::expert_gradient_reduced_over_data, "expert_gradient_reduced_over_data"},
    Named{Pitfall::dropped_token_takes_slot_zero, "dropped_token_takes_slot_zero"},
    Named{Pitfall::gates_not_renormalised, "gates_not_renormalised"},
    Named{Pitfall::recompute_draws_other_masks, "recompute_draws_other_masks"},
    Named{Pitfall::recomputed_activations_kept, "recomputed_activations_kept"},
    Named{Pitfall::overflow_not_agreed, "overflow_not_agreed"},
    Named{Pitfall::scale_updated_before_agreement, "scale_updated_before_agreement"},
    Named{Pitfall::clipped_before_unscale, "clipped_before_unscale"},
    Named{Pitfall::norm_with_next_scale, "norm_with_next_scale"},
    Named{Pitfall::overflow_keeps_growth_count, "overflow_keeps_growth_count"},
    Named{Pitfall::skipped_step_counts_as_update, "skipped_step_counts_as_update"},
    Named{Pitfall::master_not_refreshed_on_load, "master_not_refreshed_on_load"},
    Named{Pitfall::update_in_storage_precision, "update_in_storage_precision"},
    Named{Pitfall::scaler_count_not_saved, "scaler_count_not_saved"},
    Named{Pitfall::unscaled_in_half, "unscaled_in_half"},
    Named{Pitfall::micro_batches_summed_in_half, "micro_batches_summed_in_half"},
    Named{Pitfall::growth_count_exceeds, "growth_count_exceeds"},
    Named{Pitfall::fp8_history_not_saved, "fp8_history_not_saved"},
    Named{Pitfall::fp8_amax_of_one_rank, "fp8_amax_of_one_rank"},
    Named{Pitfall::norm_over_unowned_gradients, "norm_over_unowned_gradients"},
    Named{Pitfall::shard_remainder_dropped, "shard_remainder_dropped"},
    Named{Pitfall::gathered_weights_stale, "gathered_weights_stale"},
    Named{Pitfall::offload_read_too_early, "offload_read_too_early"},
    Named{Pitfall::full_optimizer_state_kept, "full_optimizer_state_kept"},
    Named{Pitfall::buckets_in_arrival_order, "buckets_in_arrival_order"},
    Named{Pitfall::gathered_parameters_kept, "gathered_parameters_kept"},
    Named{Pitfall::bucket_buffer_reused_in_flight, "bucket_buffer_reused_in_flight"},
    Named{Pitfall::bucket_sent_before_filled, "bucket_sent_before_filled"},
    Named{Pitfall::wait_missing_before_norm, "wait_missing_before_norm"},
    Named{Pitfall::overlap_lost_to_blocking_wait, "overlap_lost_to_blocking_wait"},
    Named{Pitfall::tensor_chunk_merge_too_early, "tensor_chunk_merge_too_early"},
    Named{Pitfall::sparse_index_wraps, "sparse_index_wraps"},
    Named{Pitfall::residual_not_saved, "residual_not_saved"},
    Named{Pitfall::residual_of_rank_zero, "residual_of_rank_zero"},
    Named{Pitfall::residual_keyed_by_bucket, "residual_keyed_by_bucket"},
    Named{Pitfall::residual_reset_on_rebuild, "residual_reset_on_rebuild"},
    Named{Pitfall::last_nibble_dropped, "last_nibble_dropped"},
    Named{Pitfall::compression_not_active, "compression_not_active"},
    Named{Pitfall::residual_committed_on_skipped_step, "residual_committed_on_skipped_step"},
    Named{Pitfall::quantized_sum_without_server_feedback, "quantized_sum_without_server_feedback"},
    Named{Pitfall::residual_keeps_old_scale, "residual_keeps_old_scale"},
    Named{Pitfall::checkpoint_written_in_place, "checkpoint_written_in_place"},
    Named{Pitfall::latest_before_durable, "latest_before_durable"},
    Named{Pitfall::checkpoint_of_live_step, "checkpoint_of_live_step"},
    Named{Pitfall::last_good_checkpoint_pruned, "last_good_checkpoint_pruned"},
    Named{Pitfall::snapshot_aliases_live_state, "snapshot_aliases_live_state"},
    Named{Pitfall::schedule_restarts_on_load, "schedule_restarts_on_load"},
    Named{Pitfall::random_step_restarts_on_load, "random_step_restarts_on_load"},
    Named{Pitfall::fused_shards_in_rank_order, "fused_shards_in_rank_order"},
    Named{Pitfall::missing_tensor_keeps_initial, "missing_tensor_keeps_initial"},
    Named{Pitfall::missing_hash_accepted, "missing_hash_accepted"},
    Named{Pitfall::every_replica_writes, "every_replica_writes"},
    Named{Pitfall::save_waits_for_disk, "save_waits_for_disk"},
    Named{Pitfall::sample_index_wraps, "sample_index_wraps"},
    Named{Pitfall::padding_is_target, "padding_is_target"},
    Named{Pitfall::packed_documents_attend, "packed_documents_attend"},
    Named{Pitfall::buckets_drained_in_order, "buckets_drained_in_order"},
    Named{Pitfall::labels_shifted_twice, "labels_shifted_twice"},
    Named{Pitfall::resume_skips_every_epoch, "resume_skips_every_epoch"},
    Named{Pitfall::prefetch_reads_on_demand, "prefetch_reads_on_demand"},
    Named{Pitfall::departed_samples_forgotten, "departed_samples_forgotten"},
    Named{Pitfall::waiting_rank_taken_for_hung, "waiting_rank_taken_for_hung"},
    Named{Pitfall::one_limit_for_all_phases, "one_limit_for_all_phases"},
    Named{Pitfall::reported_rank_never_cleared, "reported_rank_never_cleared"},
    Named{Pitfall::messages_without_deadline, "messages_without_deadline"},
    Named{Pitfall::shrink_keeps_accumulation, "shrink_keeps_accumulation"},
    Named{Pitfall::memory_tier_not_used, "memory_tier_not_used"},
    Named{Pitfall::neighbour_keeps_own_shard, "neighbour_keeps_own_shard"},
    Named{Pitfall::straggler_by_wall_time, "straggler_by_wall_time"},
    Named{Pitfall::nan_checked_on_rank_zero, "nan_checked_on_rank_zero"},
    Named{Pitfall::nan_raised_on_one_rank, "nan_raised_on_one_rank"},
    Named{Pitfall::unsound_state_saved, "unsound_state_saved"},
    Named{Pitfall::healthy_checkpoint_pruned, "healthy_checkpoint_pruned"},
    Named{Pitfall::skip_by_update_number, "skip_by_update_number"},
    Named{Pitfall::rollback_without_limit, "rollback_without_limit"},
    Named{Pitfall::spike_enters_window, "spike_enters_window"},
    Named{Pitfall::replica_compared_with_itself, "replica_compared_with_itself"},
    Named{Pitfall::rollback_keeps_moments, "rollback_keeps_moments"},
    Named{Pitfall::monitors_not_sampled, "monitors_not_sampled"},
    Named{Pitfall::groups_from_transposed_grid, "groups_from_transposed_grid"},
    Named{Pitfall::reduction_over_wrong_group, "reduction_over_wrong_group"},
    Named{Pitfall::rows_by_world_rank, "rows_by_world_rank"},
    Named{Pitfall::replicated_clipped_on_tensor_rank_zero, "replicated_clipped_on_tensor_rank_zero"},
    Named{Pitfall::stage_clips_by_own_norm, "stage_clips_by_own_norm"},
    Named{Pitfall::reduced_element_flipped, "reduced_element_flipped"},
    Named{Pitfall::ring_step_off_by_one, "ring_step_off_by_one"},
    Named{Pitfall::collective_parts_swapped, "collective_parts_swapped"},
    Named{Pitfall::small_message_protocol_stale, "small_message_protocol_stale"},
    Named{Pitfall::hierarchical_counts_leader_twice, "hierarchical_counts_leader_twice"},
    Named{Pitfall::full_attention_flops, "full_attention_flops"},
    Named{Pitfall::peak_of_one_device, "peak_of_one_device"},
    Named{Pitfall::spans_summed_not_united, "spans_summed_not_united"},
    Named{Pitfall::waits_counted_as_compute, "waits_counted_as_compute"},
    Named{Pitfall::timer_stopped_before_completion, "timer_stopped_before_completion"},
    Named{Pitfall::warm_up_included, "warm_up_included"},
    Named{Pitfall::all_reduce_factor_for_every_collective, "all_reduce_factor_for_every_collective"},
    Named{Pitfall::communication_counted_twice, "communication_counted_twice"},
    Named{Pitfall::recompute_counted_in_mfu, "recompute_counted_in_mfu"},
    Named{Pitfall::bubble_not_scaled_by_chunks, "bubble_not_scaled_by_chunks"},
    Named{Pitfall::memory_of_last_stage_for_all, "memory_of_last_stage_for_all"},
    Named{Pitfall::contention_ignored, "contention_ignored"},
    Named{Pitfall::both_sides_frozen, "both_sides_frozen"},
    Named{Pitfall::same_batch_on_every_rank, "same_batch_on_every_rank"},
    Named{Pitfall::bound_widened, "bound_widened"},
    Named{Pitfall::verdict_of_rank_zero, "verdict_of_rank_zero"},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (static_cast<std::size_t>(kNames[i].pitfall) != i) return false;
  }
  return kNames.size() == kPitfalls;
}
static_assert(in_order(), "kNames lists every pitfall once, in the order of the enumeration");

constexpr auto kAll = [] {
  std::array<Pitfall, kPitfalls> all{};
  for (std::size_t i = 0; i < kPitfalls; ++i) all[i] = static_cast<Pitfall>(i);
  return all;
}();

}  // namespace

std::string_view name(Pitfall pitfall) { return kNames[static_cast<std::size_t>(pitfall)].name; }

std::optional<Pitfall> find_pitfall(std::string_view name) {
  for (const Named& named : kNames) {
    if (named.name == name) return named.pitfall;
  }
  return std::nullopt;
}

std::span<const Pitfall> all_pitfalls() { return kAll; }

std::vector<Pitfall> PitfallSet::list() const {
  std::vector<Pitfall> on;
  for (const Pitfall pitfall : kAll) {
    if (this->on(pitfall)) on.push_back(pitfall);
  }
  return on;
}

}  // namespace tandem
