// Pictures as models take them.
import UIKit

extension UIImage {
    /// The picture in this size as planes of red, green and blue, with ImageNet's mean taken off and divided by its deviation.
    func normalized(width: Int, height: Int) -> [Float]? {
        let means: [Float] = [0.485, 0.456, 0.406], deviations: [Float] = [0.229, 0.224, 0.225]
        var bytes = [UInt8](repeating: 0, count: 4 * width * height)
        let drawn: Bool = bytes.withUnsafeMutableBytes { memory in
            guard
                let image = cgImage,
                let context = CGContext(
                    data: memory.baseAddress, width: width, height: height, bitsPerComponent: 8, bytesPerRow: 4 * width,
                    space: CGColorSpaceCreateDeviceRGB(), bitmapInfo: CGImageAlphaInfo.noneSkipLast.rawValue)
            else { return false }
            context.interpolationQuality = .high
            context.draw(image, in: CGRect(x: 0, y: 0, width: width, height: height))
            return true
        }
        guard drawn else { return nil }
        var planes = [Float](repeating: 0, count: 3 * width * height)
        for pixel in 0..<width * height {
            for channel in 0..<3 {
                let value = Float(bytes[4 * pixel + channel]) / 255
                planes[channel * width * height + pixel] = (value - means[channel]) / deviations[channel]
            }
        }
        return planes
    }
}
