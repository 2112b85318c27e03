// A streaming client in Go. From this folder, with protoc, protoc-gen-go and protoc-gen-go-grpc on
// PATH:
//
//	sh generate.sh
//	go mod tidy
//	go run . [ADDRESS [PROMPT]]
//
// BATON_API_KEY is sent, if it is set. Ctrl-C cancels the request.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/baton-client/batonv1"
)

func main() {
	log.SetFlags(0)
	address, prompt := "127.0.0.1:50051", "Open the file"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	// Dial does not connect yet. From grpc-go 1.63 on its newer name is NewClient, and
	// WithTransportCredentials(insecure.NewCredentials()) is that of WithInsecure.
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	// Cancelling the context cancels the request: always, or the router goes on generating.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	if key := os.Getenv("BATON_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	if err := stream(ctx, batonv1.NewGenerationServiceClient(connection), prompt); err != nil {
		known := status.Convert(err)
		log.Fatalf("\n%s: %s", known.Code(), known.Message())
	}
}

// stream prints a completion as it comes.
func stream(ctx context.Context, client batonv1.GenerationServiceClient, prompt string) error {
	messages, err := client.GenerateStream(ctx, &batonv1.GenerateRequest{
		Prompt:   &batonv1.GenerateRequest_Text{Text: prompt},
		Sampling: &batonv1.SamplingParams{Temperature: proto.Float32(0.7), Seed: proto.Uint64(1)},
		Stopping: &batonv1.StoppingParams{MaxTokens: proto.Uint32(16)},
	})
	if err != nil {
		return err
	}
	for {
		message, err := messages.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(message.GetText())
		if reason := message.GetFinishReason(); reason != batonv1.FinishReason_FINISH_REASON_UNSPECIFIED {
			fmt.Printf("\nfinished: %s\n", reason)
		}
		if usage := message.GetUsage(); usage != nil {
			fmt.Printf("tokens: %d\n", usage.GetCompletionTokens())
		}
	}
}
