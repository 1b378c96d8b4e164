// SPDX-License-Identifier: Apache-2.0
// Flights as text, for the way to another process.
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "optimized/comm/flight_recorder.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

Json to_json(const Flight& flight) {
  Json json = {{"number", flight.number},
               {"state", static_cast<int>(flight.state)},
               {"posted", flight.posted_seconds_ago},
               {"changed", flight.changed_seconds_ago}};
  if (flight.is_message) {
    const MessageCall& message = flight.message;
    json["message"] = {
        {"sends", message.sends()},
        {"rank", message.rank},
        {"peer", message.peer},
        {"ordinal", message.ordinal},
        {"elements", message.elements},
        {"dtype", static_cast<int>(message.dtype)},
        {"name", message.options.name},
        {"envelope", {message.envelope.step, message.envelope.micro_batch, message.envelope.chunk, message.envelope.direction}}};
    return json;
  }
  const Call& call = flight.call;
  json["call"] = {{"kind", static_cast<int>(call.kind)},
                  {"dtype", static_cast<int>(call.dtype)},
                  {"elements", call.elements},
                  {"counts", call.counts},
                  {"receives", call.receive_counts},
                  {"root", call.root},
                  {"name", call.options.name}};
  if (call.options.algorithm) json["call"]["algorithm"] = static_cast<int>(*call.options.algorithm);
  return json;
}

MessageCall message_from(const Json& json) {
  MessageCall message;
  message.direction = json.at("sends").get<bool>() ? MessageCall::Direction::send : MessageCall::Direction::recv;
  message.rank = json.at("rank");
  message.peer = json.at("peer");
  message.ordinal = json.at("ordinal");
  message.elements = json.at("elements");
  message.dtype = static_cast<DType>(json.at("dtype").get<int>());
  message.options.name = json.at("name");
  const Json& envelope = json.at("envelope");
  message.envelope = {envelope.at(0), envelope.at(1), envelope.at(2), envelope.at(3)};
  return message;
}

Call call_from(const Json& json) {
  Call call;
  call.kind = static_cast<CallKind>(json.at("kind").get<int>());
  call.dtype = static_cast<DType>(json.at("dtype").get<int>());
  call.elements = json.at("elements");
  call.counts = json.at("counts").get<std::vector<std::int64_t>>();
  call.receive_counts = json.at("receives").get<std::vector<std::int64_t>>();
  call.root = json.at("root");
  call.options.name = json.at("name");
  if (json.contains("algorithm")) call.options.algorithm = static_cast<CollectiveAlgorithm>(json.at("algorithm").get<int>());
  return call;
}

Flight flight_from(const Json& json) {
  Flight flight;
  flight.number = json.at("number");
  flight.state = static_cast<FlightState>(json.at("state").get<int>());
  flight.posted_seconds_ago = json.at("posted");
  flight.changed_seconds_ago = json.at("changed");
  flight.is_message = json.contains("message");
  if (flight.is_message) {
    flight.message = message_from(json.at("message"));
  } else {
    flight.call = call_from(json.at("call"));
  }
  return flight;
}

}  // namespace

std::string serialise(const RankFlights& flights) {
  Json groups = Json::array();
  for (const GroupFlights& group : flights.groups) {
    Json list = Json::array();
    for (const Flight& flight : group.flights) list.push_back(to_json(flight));
    groups.push_back({{"group", group.group},
                      {"members", group.members},
                      {"posted", group.collectives_posted},
                      {"arrived", group.collectives_arrived},
                      {"flights", std::move(list)}});
  }
  // Names may hold any bytes; what is no UTF-8 becomes a replacement character.
  return Json{{"rank", flights.rank}, {"groups", std::move(groups)}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

RankFlights parse_rank_flights(std::string_view text) {
  try {
    const Json json = Json::parse(text);
    RankFlights result;
    result.rank = json.at("rank");
    for (const Json& item : json.at("groups")) {
      GroupFlights& group = result.groups.emplace_back();
      group.group = item.at("group");
      group.members = item.at("members").get<std::vector<int>>();
      group.collectives_posted = item.at("posted");
      group.collectives_arrived = item.at("arrived");
      for (const Json& flight : item.at("flights")) group.flights.push_back(flight_from(flight));
    }
    return result;
  } catch (const Json::exception& error) {
    throw ContractError(fmt::format("flights of a rank: {}", error.what()));
  }
}

}  // namespace tandem
