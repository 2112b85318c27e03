// A client with grpc++: client PROTOS ADDRESS. It runs jobs from standard input, one after the other;
// tests/support/grpc_clients/program.py describes the lines.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <string>

#include "baton/v1/generation.grpc.pb.h"

using google::protobuf::Message;
using google::protobuf::Struct;
using google::protobuf::Value;
using google::protobuf::util::JsonStringToMessage;
using google::protobuf::util::MessageToJsonString;

namespace {

std::string to_json(const Message& message) {
  std::string json;
  if (!MessageToJsonString(message, &json).ok()) std::exit(1);
  return json;
}

void write_message(int id, const Message& message) {
  std::cout << "{\"id\": " << id << ", \"message\": " << to_json(message) << "}" << std::endl;
}

void set_up(grpc::ClientContext* context, const google::protobuf::Map<std::string, Value>& job) {
  if (job.count("timeoutS")) {
    const auto timeout = std::chrono::milliseconds(
        static_cast<int64_t>(1000 * job.at("timeoutS").number_value()));
    context->set_deadline(std::chrono::system_clock::now() + timeout);
  }
  if (job.count("metadata")) {
    for (const auto& [name, value] : job.at("metadata").struct_value().fields())
      context->AddMetadata(name, value.string_value());
  }
}

void run(baton::v1::GenerationService::Stub& stub, const std::string& line) {
  Struct parsed;
  if (!JsonStringToMessage(line, &parsed).ok()) std::exit(1);
  const auto& job = parsed.fields();
  const int id = static_cast<int>(job.at("id").number_value());
  baton::v1::GenerateRequest request;
  if (!JsonStringToMessage(to_json(job.at("request")), &request).ok()) std::exit(1);
  grpc::ClientContext context;
  set_up(&context, job);
  grpc::Status status;
  if (job.at("method").string_value() == "Generate") {
    baton::v1::GenerateResponse response;
    status = stub.Generate(&context, request, &response);
    if (status.ok()) write_message(id, response);
  } else {
    const auto reader = stub.GenerateStream(&context, request);
    baton::v1::GenerateStreamResponse response;
    while (reader->Read(&response)) write_message(id, response);
    status = reader->Finish();
  }
  Struct result;
  auto& fields = *result.mutable_fields();
  fields["id"].set_number_value(id);
  fields["code"].set_number_value(status.error_code());
  fields["details"].set_string_value(status.error_message());
  std::cout << to_json(result) << std::endl;
}

}  // namespace

int main(int, char** arguments) {
  const auto channel = grpc::CreateChannel(arguments[2], grpc::InsecureChannelCredentials());
  const auto stub = baton::v1::GenerationService::NewStub(channel);
  for (std::string line; std::getline(std::cin, line);) run(*stub, line);
}
